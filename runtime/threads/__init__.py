"""Work on other threads, and signals that leave nothing half done."""
