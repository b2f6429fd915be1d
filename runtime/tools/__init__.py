"""What measures, compares and shows packages."""
