"""Other engines that write with the same model, each in one file behind one interface; see `bench/peer.py`."""
