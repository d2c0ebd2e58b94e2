"""Interceptors: the code that runs around every call of a server.

Owns request ids, RPC metrics, bounds on calls and requests, and the mapping of exceptions to
statuses. Knows no service: the error table, the limits and the metrics registry are given.

    request_id     outermost: one id per call, on its log lines and in its trailing metadata
    rpc_metrics    calls by status code, and their duration
    access         who may call
    bounds         how many calls run, and how many requests are received, at a time
    error_mapping  innermost: request limits, and exceptions to statuses
    callers        a caller's certificate and token
    base           the common base class, and handlers of all four shapes as coroutines
"""
