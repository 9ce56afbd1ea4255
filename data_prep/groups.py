"""Groups of samples that are copies of each other, by any chain of matches."""

from collections.abc import Iterable


class Groups:
    """Disjoint groups of numbers, each named by its smallest member.

    Only members of groups of two and more are held.
    """

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}

    def first(self, member: int) -> int:
        """Give the smallest member of the group that a number is in; itself where it is alone."""
        parent = self._parent
        while (above := parent.get(member, member)) != member:
            # Every second step is shortened: chains stay short.
            parent[member] = parent.get(above, above)
            member = parent[member]
        return member

    def join(self, pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
        """Join the groups of the members of each pair.

        Args:
            pairs: Any two numbers each.

        Returns:
            Of every number that was the first of its group and is no longer: the first one now.
        """
        lost = []
        for pair in pairs:
            small, large = sorted((self.first(pair[0]), self.first(pair[1])))
            if small != large:
                self._parent[large] = small
                lost.append(large)
        return {member: self.first(member) for member in sorted(lost)}
