"""Tries the axes rules: each form of node that would be sharded runs whole and in shards."""
