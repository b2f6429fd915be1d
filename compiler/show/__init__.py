"""Shows plans on the terminal and as pages, and the progress of a compile."""
