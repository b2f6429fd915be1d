"""A plan becomes graphs and programs, one a rank."""
