"""Write rank graphs as engine files, and make a checked package of them."""
