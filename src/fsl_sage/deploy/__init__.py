"""A federation of separate organisations: the Flower app of a run, both halves of it, and a demo on one machine.

agreement     what server and sites have agreed on besides the configuration
site          the client's side of a round
client_app    the ClientApp: what a node does with a message
server_app    the ServerApp: the ordinary loop over rounds, with the clients at their nodes
app           writes an app for `flwr run`
certificates  a CA of one's own, a server's certificate, the keys of nodes
processes     SuperLink, SuperNodes and `flwr` as processes of this machine
demo          all of it on loopback, checked against the in-process run
"""
