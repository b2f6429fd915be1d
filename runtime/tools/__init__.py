"""Tools that measure, compare and show packages."""
