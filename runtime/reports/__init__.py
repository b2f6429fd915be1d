"""Pages of pictures: what a plan, a package, its times and its check look like, each as one file for a browser."""
