"""Other engines that run the same model; each file is a peer with the interface of `bench/peer.py`."""
