"""Compares what the ranks of one run noted: the findings that only several ranks together show."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from halfstep.events.vocabulary import Backward, Collective, EpochEnd, Event, Made, Place, RunEnd, ScalerUpdate
from halfstep.findings.finding import Finding, Severity
from halfstep.record.probes.telling import finding
from halfstep.record.samples import joined
from halfstep.record.telling import Heard
from halfstep.report.parts import Table
from halfstep.rules.measured import ranks as cards
from halfstep.rules.ranks.ddp_no_sampler import CARD as SAME_SAMPLES
from halfstep.rules.ranks.ddp_rank_conditional_collective import CARD as CONDITIONAL
from halfstep.rules.ranks.ddp_rank_local_skip import CARD as SKIP
from halfstep.rules.ranks.ddp_same_seed import CARD as SAME_SEED
from halfstep.rules.ranks.ddp_uneven_inputs import CARD as UNEVEN
from halfstep.rules.ranks.ddp_unused_params import CARD as UNUSED

MOST_NAMED = 5
CAUSES = {
    cards.UNSEEN.name: (cards.SAMPLER.name,),
    UNEVEN.name: (SKIP.name,),
    cards.REPLICAS.name: (
        *("ddp-no-sync-off-by-one", "ddp-module-bypass", "ddp-rank-local-skip", "ddp-unequal-scales", "amp-step-bypass"),
        *("ddp-zero-gradients", "ddp-uneven-inputs", "ddp-unused-params"),
    ),
    "amp-scale-collapse": ("amp-loss-half-reduction", "amp-fp16-eps", "amp-gradpenalty-scaled", "amp-unscaled-backward"),
    "grad-zero-missing": ("grad-zero-missing-branch",),
    "weights-not-finite": ("amp-half-params", "amp-step-bypass"),
    "learning-rate-too-high": ("amp-step-bypass", "grad-zero-missing"),
    "not-finite": ("amp-gradpenalty-scaled", "amp-loss-half-reduction", "amp-step-bypass", "amp-fp16-eps"),
}
"""A symptom, and the faults that explain it."""


def compared(heard: Sequence[Heard]) -> list[Finding]:
    """What the ranks have not alike, without what another finding among them explains."""
    ranks = sorted((h for h in heard if h.rank is not None and h.size > 1), key=lambda h: h.rank or 0)
    if len(ranks) < 2:
        return []
    checks = (_replicas, _samples, _seeds, _unused, _gradients, _idle, _shapes, _samplers, _scales, _work, _collectives)
    return [found for check in checks for found in check(ranks)]


def denied(heard: Sequence[Heard]) -> set[str]:
    """Faults that the text may have, and that the ranks did not show."""
    ranks = [h for h in _all(heard) if h.size > 1]
    if len(ranks) < 2:
        return set()
    first, ended = ranks[0].shared, not any(h.ending for h in ranks)
    random = zip(*(h.shared.random for h in ranks), strict=False)
    shown = {
        UNEVEN.name: ended and first.backwards > 0 and len({h.shared.backwards for h in ranks}) == 1,
        SAME_SEED.name: all(len({state for _, state in states}) > 1 for states in random) and bool(first.random),
        UNUSED.name: bool(first.missing) and not any(names for h in ranks for names in h.shared.missing),
    }
    return {name for name, otherwise in shown.items() if otherwise}


def _all(heard: Sequence[Heard]) -> list[Heard]:
    """The ranks in order, or the one process that trained."""
    ranks = sorted((h for h in heard if h.rank is not None), key=lambda h: h.rank or 0)
    return ranks or [h for h in heard if h.updates]


def unseen(heard: Sequence[Heard]) -> Iterator[Finding]:
    """Samples that no rank got in several whole passes over a data set."""
    for data in joined([h.samples for h in _all(heard)]):
        if data.passes < 2 or not data.unseen:
            continue
        first = ", ".join(map(str, data.unseen[:MOST_NAMED])) + (", ..." if len(data.unseen) > MOST_NAMED else "")
        message = f"{len(data.unseen)} of {data.size} samples were handed out in none of {data.passes} passes: {first}"
        few = len(data.unseen) <= data.explained
        yield replace(finding(cards.UNSEEN, data.place, message), severity=Severity.INFO if few else Severity.WARNING)


def samples_table(heard: Sequence[Heard]) -> Table | None:
    """What loaders handed out; None where none was followed to the end of a pass."""
    rows = [
        *(
            (f"line {d.place.line}" if d.place else "unknown", *map(str, (d.size, d.passes, len(d.unseen), d.doubled)))
            for d in joined([h.samples for h in _all(heard)])
        )
    ]
    about = (
        "All samples of a data set should be handed out in every pass, to one rank each; a few twice where ranks share unevenly."
    )
    columns = ("loader", "samples", "whole passes", "seen by nobody", "more than once a pass")
    return Table(title="Samples", about=about, columns=columns, rows=tuple(rows)) if rows else None


def unexplained(findings: Sequence[Finding]) -> list[Finding]:
    """The findings without the symptoms of faults that were found too."""
    named = {finding.rule for finding in findings}
    return [f for f in findings if not named & set(CAUSES.get(f.rule, ()))]


def _replicas(ranks: Sequence[Heard]) -> Iterator[Finding]:
    first = ranks[0].shared
    for update in sorted(set.intersection(*(set(h.shared.checksums) for h in ranks))):
        for other in ranks[1:]:
            pairs = zip(first.names, first.checksums[update], other.shared.checksums[update], strict=False)
            differ = [name for name, mine, theirs in pairs if mine != theirs]
            if differ:
                message = (
                    f"after update {update} rank {ranks[0].rank} and rank {other.rank} differ in {len(differ)} of "
                    f"{len(first.names)} parameters, first in `{differ[0]}`"
                )
                yield finding(cards.REPLICAS, first.place, message)
                return


def _samples(ranks: Sequence[Heard]) -> Iterator[Finding]:
    for one, other in itertools.combinations(ranks, 2):
        mine = [print for print, _ in one.shared.inputs]
        theirs = [print for print, _ in other.shared.inputs]
        count = min(len(mine), len(theirs))
        if count >= 2 and len(set(mine[:count])) >= 2 and mine[:count] == theirs[:count]:
            message = f"rank {one.rank} and rank {other.rank} got the same samples in each of the first {count} forward passes"
            found = finding(SAME_SAMPLES, one.shared.place, message)
            yield found if _has_map_style_loader(one) else replace(found, severity=Severity.INFO)
            return


def _has_map_style_loader(heard: Heard) -> bool:
    """Whether samples come from a data set that could be split; what a script draws at random may be alike by its wish."""
    return any(isinstance(e, Made) and e.what.kind == "loader" and e.facts.get("map style") for e in _events(heard))


def _seeds(ranks: Sequence[Heard]) -> Iterator[Finding]:
    first = ranks[0].shared.random
    drawn = [i for i, (a, b) in enumerate(itertools.pairwise(first)) if a[0] == b[0] and a[1] != b[1]]
    if drawn and all(h.shared.random == first for h in ranks[1:]):
        seeds = [draft for draft in _events(ranks[0]) if type(draft).__name__ == "Seed"]
        place = seeds[-1].stack[-1] if seeds and seeds[-1].stack else ranks[0].shared.place
        message = f"all {len(ranks)} ranks drew the same random numbers in the first {len(first)} updates"
        yield replace(finding(SAME_SEED, place, message), severity=Severity.INFO)


def _unused(ranks: Sequence[Heard]) -> Iterator[Finding]:
    shared = ranks[0].shared
    names = set(shared.missing[0]) if shared.missing else set()
    if names and not shared.find_unused and all(h.shared.missing and names <= set(h.shared.missing[0]) for h in ranks):
        wrapped = next((e.place for e in _events(ranks[0]) if isinstance(e, Made) and e.facts.get("wrapper") == "ddp"), None)
        message = f"{len(names)} parameters get no gradient, first `{min(names)}`: DDP raises in the second iteration"
        yield finding(UNUSED, wrapped or shared.place, message)


def _gradients(ranks: Sequence[Heard]) -> Iterator[Finding]:
    for update, lacking in enumerate(zip(*(h.shared.missing for h in ranks), strict=False)):
        empty = [set(names) | set(h.shared.zero[update]) for names, h in zip(lacking, ranks, strict=True)]
        odd = sorted(set().union(*empty) - set.intersection(*empty))
        if odd:
            where = [str(h.rank) for h, names in zip(ranks, empty, strict=True) if odd[0] in names]
            message = f"in update {update + 1} the gradient of `{odd[0]}` is zero or missing on rank {', '.join(where)} only"
            yield finding(cards.ZERO, ranks[0].shared.place, message)
            return


def _idle(ranks: Sequence[Heard]) -> Iterator[Finding]:
    """What a rank's own micro-batches bring nothing to, update after update, while another rank's do."""
    always = [frozenset.intersection(*h.shared.idle) if len(h.shared.idle) > 1 else frozenset() for h in ranks]
    never = [frozenset(h.shared.names) - frozenset().union(*h.shared.idle) for h in ranks]
    count = len(ranks[0].shared.idle)
    for rank, idle in zip(ranks, always, strict=True):
        names = sorted(idle & frozenset().union(*never))
        if names:
            whole = len(idle) == len(rank.shared.names)
            what = "any parameter" if whole else f"{len(names)} of {len(rank.shared.names)} parameters, first `{names[0]}`"
            message = f"in each of the first {count} updates rank {rank.rank} brings no gradient but zeros to {what}, others do"
            yield replace(finding(cards.ZERO, rank.shared.place, message), severity=Severity.WARNING if whole else Severity.INFO)
            return


def _shapes(ranks: Sequence[Heard]) -> Iterator[Finding]:
    """Collectives that were given differing shapes, which hang or mix numbers up; and batches of differing sizes."""
    for calls in zip(*(h.shared.collectives for h in ranks), strict=False):
        if len({call.kind for call in calls}) > 1:
            break  # they are no longer at the same one
        if len({call.shapes for call in calls}) > 1:
            told = ", ".join(f"{list(map(list, c.shapes))} on rank {h.rank}" for c, h in zip(calls, ranks, strict=True))
            yield finding(cards.SHAPES, calls[0].place, f"`{calls[0].kind}` is given {told}")
            return
    for number, inputs in enumerate(zip(*(h.shared.inputs for h in ranks), strict=False), 1):
        sizes = [shape[0] if shape else 1 for _, shape in inputs]
        if len(set(sizes)) > 1:
            told = ", ".join(f"{size} on rank {h.rank}" for size, h in zip(sizes, ranks, strict=True))
            message = f"the batch of training pass {number} holds {told}: an average over ranks weighs these samples unequally"
            yield replace(finding(cards.SHAPES, ranks[0].shared.place, message), severity=Severity.INFO)
            return


def _samplers(ranks: Sequence[Heard]) -> Iterator[Finding]:
    for rank in ranks:
        for made in _events(rank):
            if isinstance(made, Made) and made.facts.get("distributed") and made.facts.get("replicas") is not None:
                replicas, place = made.facts["replicas"], made.facts.get("rank")
                if replicas != rank.size or place != rank.rank:
                    message = f"on rank {rank.rank} of {rank.size} the sampler takes part {place} of {replicas}"
                    yield finding(cards.SAMPLER, made.place, message)
                    return
    seeds = [[m.facts.get("seed") for m in _events(h) if isinstance(m, Made) and m.facts.get("distributed")] for h in ranks]
    odd = next((h for h, mine in zip(ranks, seeds, strict=True) if mine != seeds[0] and len(mine) == len(seeds[0])), None)
    if odd is not None:
        made = next(m for m in _events(odd) if isinstance(m, Made) and m.facts.get("distributed"))
        yield finding(cards.SAMPLER, made.place, f"the samplers of rank {ranks[0].rank} and rank {odd.rank} have different seeds")


def _scales(ranks: Sequence[Heard]) -> Iterator[Finding]:
    scales = [[e for e in _events(h) if isinstance(e, ScalerUpdate) and e.scale is not None] for h in ranks]
    for number, events in enumerate(zip(*scales, strict=False), 1):
        if len({e.scale for e in events}) > 1:
            told = ", ".join(f"{e.scale:g} on rank {h.rank}" for e, h in zip(events, ranks, strict=True))
            yield finding(cards.SCALES, events[0].place, f"after update {number} the loss scale is {told}")
            return


def _work(ranks: Sequence[Heard]) -> Iterator[Finding]:
    """Ranks that made fewer backward passes than others, and did not fail."""
    few, many = min(ranks, key=_backwards), max(ranks, key=_backwards)
    if _backwards(few) == _backwards(many) or few.ending.startswith("it raised"):
        return
    told = f"rank {few.rank} made {_backwards(few)} backward passes, rank {many.rank} {_backwards(many)}"
    waits = f"; rank {many.rank} {_standing(many)}"
    last = [next((e for e in reversed(_events(h)) if isinstance(e, Backward)), None) for h in (few, many)]
    if last[0] is None or last[1] is None:
        return
    ended = next((e for e in reversed(_events(few)) if isinstance(e, EpochEnd)), None)
    turns = [tuple(t.index for t in b.loops) for b in last if b is not None]
    if turns[0] == turns[1] and turns[0]:
        yield finding(SKIP, last[0].place, f"{told}: it skipped some in which the others wait{waits}")
    elif ended is not None and ended.serial > last[0].serial:
        yield finding(UNEVEN, ended.place or last[0].place, f"{told}: its batches ended earlier{waits}")


def _collectives(ranks: Sequence[Heard]) -> Iterator[Finding]:
    """A rank that waits in a collective that another never reaches."""
    lists = [[e for e in _events(h) if isinstance(e, Collective)] for h in ranks]
    for (one, mine), (other, theirs) in itertools.permutations(zip(ranks, lists, strict=True), 2):
        if (
            mine
            and _last(one) is mine[-1]
            and one.ending
            and len(mine) > len(theirs)
            and not other.ending.startswith("it raised")
        ):
            if any(e.place == mine[-1].place for e in theirs):
                continue
            message = f"rank {one.rank} waits in `{mine[-1].kind}` for rank {other.rank}, which {_standing(other)}"
            yield finding(CONDITIONAL, mine[-1].place, message)
            return


def _backwards(heard: Heard) -> int:
    return heard.shared.backwards


def _events(heard: Heard) -> tuple[Event, ...]:
    return heard.stretches[-1] if len(heard.stretches) > 1 else heard.stretches[0]


def _last(heard: Heard) -> Event | None:
    return next((e for e in reversed(_events(heard)) if not isinstance(e, (RunEnd, EpochEnd))), None)


def _standing(heard: Heard) -> str:
    """Where a rank stood at its end, in words."""
    last = _last(heard)
    if last is None or last.place is None:
        return "said nothing"
    where = f"line {last.place.line} ({type(last).__name__})"
    return f"waited in {where}" if heard.ending else f"had ended after {where}"


def ranks_table(heard: Sequence[Heard]) -> Table | None:
    """The ranks side by side; None where there is one process."""
    ranks = sorted((h for h in heard if h.rank is not None and h.size > 1), key=lambda h: h.rank or 0)
    if len(ranks) < 2:
        return None
    columns = ("rank", "updates", "backward passes", "DDP reductions", "own collectives", "idle parameters", "last line", "end")
    told = [f"rank {h.rank}: {h.updates} updates, {_backwards(h)} backward passes, {_end(h)}" for h in ranks]
    shown = (*told[:MOST_NAMED], f"and {len(told) - MOST_NAMED} more") if len(told) > MOST_NAMED + 1 else tuple(told)
    return Table(
        title="Ranks",
        about="All ranks should have made the same updates and ended in the same line. One reduction an update is enough: more "
        "of them are time that no_sync() would save. Idle parameters got nothing but zeros from this rank's own micro-batches.",
        columns=columns,
        rows=tuple(map(_row, ranks)),
        glance=shown,
    )


def _row(heard: Heard) -> tuple[str, ...]:
    shared, updates = heard.shared, max(heard.updates, 1)
    idle = frozenset.intersection(*shared.idle) if shared.idle else frozenset()
    return (
        *(str(heard.rank), str(heard.updates), str(_backwards(heard))),
        *(
            f"{shared.reducing / updates:.3g} an update" if shared.forwards else "none",
            f"{shared.num_collectives / updates:.3g} an update",
        ),
        *(
            f"{len(idle)} of {len(shared.names)}" if shared.idle else "unknown",
            _line(_last(heard)),
            heard.ending or "it came to its end",
        ),
    )


def _end(heard: Heard) -> str:
    return f"{heard.ending or 'it came to its end'}, last heard in line {_line(_last(heard))}"


def _line(event: Event | None) -> str:
    place: Place | None = event.place if event is not None else None
    return f"{place.line}, {type(event).__name__}" if place is not None else "unknown"
