"""The wire protocol: the messages, and packets to frames and back.

All messages can be had from here; importing any of them registers all, so that every tag is known.
"""

from kvps.protocol.checkpoint import *
from kvps.protocol.envelope import *
from kvps.protocol.membership import *
from kvps.protocol.publications import *
from kvps.protocol.replicas import *
from kvps.protocol.stores import *
from kvps.protocol.tracing import *
from kvps.protocol.transports import *
from kvps.protocol.values import *
