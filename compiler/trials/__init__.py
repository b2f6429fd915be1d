"""Rules are claims, and claims are tried: each form of node that would be sharded runs whole and in shards."""
