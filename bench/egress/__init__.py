"""What a request, a tunnel and a gigabyte cost in the egress worker, beside Envoy and squid: ``python -m bench.egress``.

The measure is CPU time of the proxy's processes per operation: on a shared machine rates and times say little, and CPU says
how many rollouts one core can serve. Peers take turns within one run, and the order turns every round.
"""
