"""Ways to divide each server's band and compute among its devices, one module each."""
