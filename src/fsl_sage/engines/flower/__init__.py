"""The Flower engine: clients at separate organisations, one message and one reply a client a round.

contents     the project's messages as Flower's, and back
foundation   what a site needs once to build its parts: the split, frozen weights, computed constants
weight_store large weights on the disk of a node, by their SHA-256
laying       sends a foundation that is too large for a message, in chunks
node_state   what a client keeps between rounds, on the disk of its node
courier      carries messages, and gives the reason for every reply that does not come
roster       which node is which client
inspection   what a reply must look like before anything touches the model
engine       the server's side of a round, with the S-server in it

Both halves of the app, the server's and the clients', are in `deploy`.

Nothing that came from a peer is unpickled: tensors travel as safetensors, everything else as plain values.
"""
