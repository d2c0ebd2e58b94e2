"""What an opened sequence begins with."""

from tests.verifier.sequences import make_open
from verifier.block_pool import BlockPool
from verifier.draft_wait import RunningMean
from verifier.messages import Open
from verifier.scheduler import Scheduler
from verifier.sequence_table import SequenceTable


def test_sequences_learn_from_each_other_how_likely_a_hint_is_right() -> None:
    first_token = RunningMean(0.5)
    scheduler = Scheduler(
        block_pool=BlockPool(64),
        block_size=4,
        max_num_seqs=8,
        max_num_batched_tokens=32,
        count_hint=lambda outcome: None,
    )
    table = SequenceTable(scheduler, max_model_len=64, max_num_waiting=8, first_token=first_token)
    table.attach(1, lambda events, step: None)
    probabilities = []
    for sequence_id in ("a", "b"):
        table.open(Open(session_id=1, sequence=make_open([1, 2, 3], sequence_id=sequence_id)))
        sequence = table.find(1, sequence_id)
        assert sequence is not None
        probabilities.append(sequence.first_token_record.probability)
        sequence.first_token_record.hinted(2, [3], sequence.token_ids)
    assert probabilities == [0, 1]
