"""Memory spaces, registered caches, the host pool's bytes and the transports between them."""
