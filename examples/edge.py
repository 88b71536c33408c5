"""Which of 30 devices should draft for which of 4 servers? Run: python examples/edge.py"""

from outpace.studies.edge.link import OneLink, advice
from outpace.studies.edge.report import sentences
from outpace.studies.edge.run import compare, find_policy
from outpace.studies.edge.settings import EdgeSettings, read_acceptance

acceptance = read_acceptance("")  # the shipped pair's, by position
settings = EdgeSettings(devices=30, servers=4, acceptance=acceptance)
names = ("alone/equal", "server-alone", "max-sinr/equal", "greedy/equal", "move/optimal")
found = compare(settings, [find_policy(name) for name in names], num_worlds=5, seed=0)
for one in found:
    print(f"{one.policy:15} {one.time:6.1f} ms per token, {one.energy:4.0f} mJ per token")
print(*sentences(found), sep="\n")
print(advice(OneLink(device_step=5.0, server_pass=60.0, rtt=20.0, acceptance=(0.8,))))
