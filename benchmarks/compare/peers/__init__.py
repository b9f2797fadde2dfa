"""The systems that kvps is measured beside, one worker program each.

The programs of MXNet and Ray run in interpreters of their own (Python 3.10 or later), which have
numpy but no torch.
"""
