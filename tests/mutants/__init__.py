"""Small mistakes put into copies of our own code, to see whether a test notices each of them."""
