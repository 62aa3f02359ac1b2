"""A federation of separate organisations: the Flower app of a run, its ServerApp, and a demo on one machine.

server_app    the ServerApp: the ordinary loop over rounds, with the clients at their nodes
app           writes an app for `flwr run`
certificates  a CA of one's own, a server's certificate, the keys of nodes
processes     SuperLink, SuperNodes and `flwr` as processes of this machine
demo          all of it on loopback, checked against the in-process run
"""
