"""The Flower engine: clients at separate organisations, one message and one reply a client a round.

agreement    what server and sites have agreed on beside the configuration
records      the project's messages as Flower's, and back
site_data    the images of a site, or the test images of the server
node_state   what a client keeps between rounds, on the disk of its node
site         the client's side of a round
client_app   the ClientApp: what a node does with a message
courier      carries messages, and says of every reply that does not come, why
roster       which node is which client
inspection   what a reply must look like before anything touches the model
engine       the server's side of a round, with the S-server in it

Nothing that came from a peer is unpickled: tensors travel as safetensors, everything else as plain values.
"""
