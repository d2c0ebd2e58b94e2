"""Failures of real processes under real requests, and what they cost: no token.

`fleet` runs the services, `link` is a wire that can be cut, `requests` records what clients get,
`run` carries out one drill and checks it, the other modules are the drills.
"""
