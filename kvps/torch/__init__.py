"""What kvps does for torch's own ways to train on many machines.

Importing it makes the backend "kvps" known to torch.distributed.
"""

from kvps.torch.rendezvous import register as _register

_register()
