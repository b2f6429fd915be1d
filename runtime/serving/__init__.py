"""Packages in servers of other projects: what is written for a server, and what it imports then."""
