"""What studies derive from tables of rows in general."""

from collections.abc import Sequence

import numpy as np
import pandas as pd


def wide(table: pd.DataFrame, measure: str, by: str, within: str) -> pd.DataFrame:
    """A measure with a column for each value of `by`, and a row for each of `within`,
    both in order of appearance."""
    keys = within.split()
    found = table.pivot(index=keys, columns=by, values=measure)
    order = pd.MultiIndex.from_frame(table[keys].drop_duplicates())
    order = order if len(keys) > 1 else order.get_level_values(0)
    return found.reindex(index=order, columns=pd.unique(table[by]))


def changes(
    table: pd.DataFrame, measure: str, order: Sequence[str], within: str
) -> pd.DataFrame:
    """Relative change of a measure from each policy of `order` to the next one; none
    from 0."""
    found = wide(table, measure, "policy", within)[list(order)]
    change = found.pct_change(axis=1, fill_method=None).iloc[:, 1:]
    return change.replace(np.inf, np.nan)


def over(
    table: pd.DataFrame, measure: str, base: str, within: str, by: str = "policy"
) -> pd.DataFrame:
    """Rows of `within` and `by`, but for `base`, with the measure over that of `base`
    in column `over`."""
    found = wide(table, measure, by, within)
    ratio = found.div(found[base], axis=0).drop(columns=base)
    return ratio.stack().rename("over").reset_index()


def spans(table: pd.DataFrame, measure: str, by: str) -> pd.DataFrame:
    """The least and the largest of a measure in each group, as `low` and `high`."""
    grouped = table.groupby(by.split(), sort=False)[measure]
    return grouped.agg(low="min", high="max").reset_index()


def best(table: pd.DataFrame, measure: str, within: str) -> pd.DataFrame:
    """In each group the row with the largest measure, the first of equal ones."""
    grouped = table.groupby(within.split(), sort=False)[measure]
    return table.loc[grouped.idxmax()]
