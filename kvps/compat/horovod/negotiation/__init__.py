"""The negotiation of collectives by name: pure rules, without threads, clocks or sockets."""
