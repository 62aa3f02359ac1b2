"""A page on loopback that shows runs while they go on, from their directories alone. It writes nothing."""
