"""Who makes a request, as far as its rules depend on it.

Owns what a client may not choose itself: its tenant, how high its priority may be, and its
tenant's quotas. Pure.
"""

import dataclasses

from gateway.errors import PermissionDeniedError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Principal:
    """An authenticated client, or anybody where clients are not authenticated.

    Attributes:
        tenant: whose pools are drafted from, whose cached prefixes are shared, and who shares the
            quotas; "" only where clients are not authenticated.
        max_priority: the highest priority of its requests; None: any.
        max_choices: the most choices of its tenant at a time; None: no quota.
        max_waiting_tokens: the most waiting prompt tokens of its tenant; None: no quota.
        weight: of its tenant, where tenants share.
    """

    tenant: str = ""
    max_priority: int | None = None
    max_choices: int | None = None
    max_waiting_tokens: int | None = None
    weight: int = 1

    def check_priority(self, priority: int) -> None:
        """Refuses a priority over the ceiling.

        Raises:
            PermissionDeniedError: it is higher.
        """
        if self.max_priority is not None and priority > self.max_priority:
            raise PermissionDeniedError(
                f"priority {priority} is over this client's ceiling of {self.max_priority}",
                field="priority",
            )


#: Every client of a gateway that authenticates nobody.
ANONYMOUS = Principal()
