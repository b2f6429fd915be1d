"""Work on other threads, and signals: what no signal leaves half done."""
