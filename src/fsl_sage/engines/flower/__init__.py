"""The Flower engine: clients at separate organisations, one message and one reply a client a round.

agreement    what server and sites have agreed on beside the configuration
records      the project's messages as Flower's, and back
site         the client's side of a round, with the site's own data
site_data    the images of a site, or the test images of the server
node_state   what a client keeps between rounds, on the disk of its node
client_app   the ClientApp
inspection   what a reply must look like before anything touches the model
roster       which node is which client
engine       the server's side of a round, with the S-server in it

Nothing that came from a peer is unpickled: tensors travel as safetensors, everything else as plain values.
"""
