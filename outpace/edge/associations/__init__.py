"""Ways to choose each device's server, one module each: `associate(problem, rng)` returns the servers of all devices.

A device without a server in reach gets ALONE. Policies that compare objectives do so with equal shares.
"""
