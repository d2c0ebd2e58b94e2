"""Drafts for vLLM from a Tandem drafter: docs/vllm.md."""

from tandem_vllm.proposer import TandemProposer as TandemProposer
