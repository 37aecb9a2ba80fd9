"""Where the records of a run also go: one file for each, behind the protocol of `sink`."""
