"""What one verifier has to do, and whether it does it.

Owns what a verifier's messages say about its load and its progress. Pure: it is told the time.
"""

import math

# The longest step counts half after some 1,400 comparable ones.
_STEP_DECAY = 0.9995
# Only a step with at least this share of the longest step's tokens lets that step's duration decay.
# Smaller ones, of which many lie between two long prompts, say nothing about long ones.
_COMPARABLE_SHARE = 0.5


class VerifierLoad:
    """Of one verifier, over all its sessions with this gateway.

    Attributes:
        num_others: sequences that other clients have there, as last reported.
        num_waiting: of all that it has, those that it does not run, as last reported.
        num_kv_blocks_used: by all that it has, as last reported.
        longest_step_s: about the longest of its last steps; 0 before the first.
        prompts: how many tokens each text has that this gateway sent it, and that has no output of
            it yet, by sequence.
        last_answer_s: when it last sent anything.
        last_progress_s: when its engine was last seen to step, or to have nothing to do.
        begun_s: when it last got a sequence of this gateway while it had none.
        full_until_s: when it may have room again, after it refused a sequence for lack of it.
        overfull_until_s: the same of a sequence with output, for which it keeps more room.
        is_unresponsive: whether it has not answered, or not made a step, for too long.
    """

    def __init__(self) -> None:
        """Nothing is known."""
        self.num_others = 0
        self.num_waiting = 0
        self.num_kv_blocks_used = 0
        self.longest_step_s = 0.0
        self.prompts: dict[str, int] = {}
        self.last_answer_s = 0.0
        self.last_progress_s = 0.0
        self.begun_s = 0.0
        self.full_until_s = -math.inf
        self.overfull_until_s = -math.inf
        self.is_unresponsive = False
        self._instance_id = ""
        # Steps known to have begun; the tokens of the longest one; the most of any, and about the
        # longest that steps of as many took.
        self._num_steps = 0
        self._longest_tokens = 0
        self._most_tokens = 0
        self._most_s = 0.0
        self._max_step_tokens = 0

    def connect(self, now_s: float, instance_id: str, max_step_tokens: int = 0) -> None:
        """A session begins. An engine that was stuck may still be: only a new process is not.

        Args:
            max_step_tokens: as in `Welcome`.
        """
        self.last_answer_s = now_s
        self._max_step_tokens = max_step_tokens
        if instance_id != self._instance_id:
            self._instance_id = instance_id
            self.num_others = 0
            self.num_waiting = 0
            self.num_kv_blocks_used = 0
            self.longest_step_s = 0.0
            self._longest_tokens = self._most_tokens = 0
            self._most_s = 0.0
            self._num_steps = 0
            self.last_progress_s = now_s
            self.full_until_s = self.overfull_until_s = -math.inf
            self.is_unresponsive = False

    def begin(self, now_s: float) -> None:
        """It gets the first sequence of this gateway."""
        self.begun_s = now_s
        if not self.is_unresponsive:
            self.last_progress_s = now_s

    def answer(self, now_s: float) -> None:
        """It has sent a message."""
        self.last_answer_s = now_s

    def step(
        self, *, step_id: int, num_tokens: int, num_sequences: int, num_own: int, step_s: float
    ) -> None:
        """The message tells of a step.

        Args:
            step_id: its number in this process.
            num_tokens: that it computed.
            num_sequences: all that it runs or that wait there.
            num_own: those of this gateway.
            step_s: how long the step took.
        """
        self.last_progress_s = self.last_answer_s
        # It is told when the next one begins. A poll that finds no more finds no progress.
        self._num_steps = step_id + 1
        self.num_others = max(0, num_sequences - num_own)
        if self.is_unresponsive:
            # The step that ends a stall is no measure for others.
            return
        # By itself: the longest step may become a smaller one, again and again, until it is tiny.
        self._most_tokens = max(self._most_tokens, num_tokens)
        if num_tokens >= _COMPARABLE_SHARE * self._most_tokens:
            self._most_s = max(self._most_s * _STEP_DECAY, step_s)
        if num_tokens >= _COMPARABLE_SHARE * self._longest_tokens:
            self.longest_step_s *= _STEP_DECAY
        if step_s > self.longest_step_s:
            self.longest_step_s, self._longest_tokens = step_s, num_tokens

    def report(
        self, *, num_running: int, num_waiting: int, num_own: int, num_steps: int, step_s: float
    ) -> None:
        """The message is an answer to a poll.

        Args:
            num_running: the sequences that its engine runs.
            num_waiting: those that wait there, for room or for their grammar.
            num_own: as in `step`.
            num_steps: that its engine has begun.
            step_s: how long a step takes on average.
        """
        # An engine that runs none has no step to make: what waits there waits for its grammar.
        # Unless it does not even know this gateway's.
        has_nothing_to_do = not num_running and num_waiting >= num_own
        if num_steps > self._num_steps or has_nothing_to_do:
            self.last_progress_s = self.last_answer_s
        self._num_steps = max(self._num_steps, num_steps)
        self.num_others = max(0, num_running + num_waiting - num_own)
        self.num_waiting = num_waiting
        if not self.longest_step_s:
            # Only until steps are known: a stall is part of the mean for a while.
            self.longest_step_s = step_s

    @property
    def expected_step_s(self) -> float:
        """About the longest that the next step may take; 0 if no step is known.

        The first long prompt takes longer than any step before, in proportion to its tokens at
        most: what each step costs beside its tokens does not grow with them.
        """
        num_tokens = min(sum(self.prompts.values()), self._max_step_tokens)
        share = num_tokens / max(1, self._most_tokens)
        return max(self.longest_step_s * max(1.0, share), self._most_s * share)

    def excuse(self, time_s: float) -> None:
        """This gateway itself was not able to listen for so long."""
        self.last_answer_s += time_s
        self.last_progress_s += time_s
        self.begun_s += time_s
