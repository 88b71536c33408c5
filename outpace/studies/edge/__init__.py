"""Simulate devices that draft for servers over a radio network: which device for which server, and whether it pays."""
