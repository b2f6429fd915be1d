"""Reports: a plan, a package, its times or its check as a page with charts, one file for a browser."""
