"""Devices that draft for servers over a radio network: who drafts for whom, with which shares, and does it pay."""
