"""Trials on hosts that are network namespaces with links of a set rate."""
