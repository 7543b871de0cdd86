"""A table of plain text: what, how much, and a remark, in columns as wide as their longest cell."""


class PlanTable:
    """Rows in the order of `add`."""

    def __init__(self) -> None:
        self._rows: list[tuple[str, str, str]] = []

    def add(self, what: str, amount: str, remark: str = "") -> None:
        """Append a row."""
        self._rows.append((what, amount, remark))

    def text(self) -> str:
        """All rows; amounts stand at the right of their column."""
        first = max(len(what) for what, _, _ in self._rows)
        second = max(len(amount) for _, amount, _ in self._rows)
        return "\n".join(
            f"{what:<{first}}  {amount:>{second}}  {remark}".rstrip() for what, amount, remark in self._rows
        )


def size_text(num_bytes: float) -> str:
    """Name a size in B, KiB, MiB or GiB with at most one decimal."""
    for unit, power in (("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if abs(num_bytes) >= 1024**power:
            return f"{num_bytes / 1024**power:,.1f} {unit}"
    return f"{num_bytes:.0f} B"
