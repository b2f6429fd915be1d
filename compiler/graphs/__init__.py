"""What all passes use to read, match and change a graph."""
