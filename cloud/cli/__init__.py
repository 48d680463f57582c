"""The verbs of people who run a fleet: thin clients of the cloud, and the cloud's own start.

Each module holds one verb and imports only click until it is called. A verb builds a request,
makes the call through `connection`, and shows the answer through `text`; it decides nothing that
the cloud does not decide again.
"""
