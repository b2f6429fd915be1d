"""The version of splitc, in one place."""

VERSION = "0.1.0"
