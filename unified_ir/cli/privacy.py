"""The options of differential privacy and of masking, of runs and of studies.

An unset option is None, because the cloud knows the defaults, too. `NEEDS` says which options have
an effect beside which others only; on their own they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import click

from triplane.proto.errors import InvalidInput
from triplane.unified_ir.cli.number_options import flag
from triplane.unified_ir.cli.robustness import KEY as LIMITS
from triplane.unified_ir.cli.robustness import limit_facts
from triplane.unified_ir.federated.core import defaults

if TYPE_CHECKING:
    from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy
    from triplane.unified_ir.federated.study.masked_sums import MaskedStudy

NOISE: Final = "privacy"
"""Parameter of a command that has the options of noise that were set."""
MASKING: Final = "masking"
"""The same for masking; None without `--mask`."""
# fmt: off
NOISE_FIELDS: Final = {
    "noise": "placement", "epsilon": "epsilon", "delta": "delta", "clip": "clip",
    "clip_quantile": "clip_quantile", "noise_multiplier": "multiplier",
    "separation": "separation", "most_uses": "most_uses", "correlated": "correlated",
}
MASKING_FIELDS: Final = {
    "least_cohort": "least", "lost_share": "lost_share", "colluding_share": "colluding_share",
    "mask_failure": "failure", "groups": "groups",
}
NEEDS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(
        ("noise", "delta", "clip", "clip_quantile", "separation", "most_uses"),
        ("epsilon", "noise_multiplier"),
    ),
    "correlated": ("separation",),
    **dict.fromkeys(MASKING_FIELDS, ("mask",)),
}
"""Options, and those of which at least one has to be set beside them."""
# fmt: on
MASKED_CAP: Final = 256
"""Largest weight of a masked update in a study, unless --max-examples says otherwise."""
EPILOG: Final = """
\b
Differential privacy (--epsilon or --noise-multiplier) bounds what the published models tell about
one device: whoever sees all of them can hardly tell whether it took part with its samples or with
none. Each change is clipped to --clip, all devices count equally, and each round's sum gets noise.
A smaller --epsilon protects more and costs accuracy; more devices in a round make up for that. With
--separation a device rests between two uses, so fewer of its uses are charged, and --correlated
lets later rounds take back a part of the noise. It does not cover the scores of devices, nor, with
--noise central, hide updates from the people who run the cloud.
  --epsilon 4 --devices 100 --clip 0.5 --separation 10 --correlated
--mask lets the cloud learn the sum of a round only (secure aggregation). With --noise distributed
beside it the devices add the noise, which then protects from the cloud, too. With --groups and
--aggregator the cloud learns a sum for each group, and lies in a few groups may be left out.
  --mask --noise distributed --epsilon 8 --devices 20 --clip 0.5
  --mask --norm-bound 2 --devices 30 --groups 6 --aggregator multi-krum
"""


def privacy_options() -> list[click.Parameter]:
    """Return the options of noise and of masking."""
    from triplane.unified_ir.federated.privacy import accountant, budget, central, clipping
    from triplane.unified_ir.federated.privacy.settings import CENTRAL, CLIP, PLACEMENTS

    share = click.FloatRange(0, 1, max_open=True)
    return [
        click.Option(
            ["--epsilon"], metavar="NUMBER",
            type=click.FloatRange(0, accountant.MAX_EPSILON, min_open=True),
            help="Differential privacy: what all rounds may spend on a device. Sets the noise "
            "unless --noise-multiplier does; the run ends before it is passed.",
        ),
        click.Option(
            ["--delta"], metavar="NUMBER", type=click.FloatRange(1e-100, 1, max_open=True),
            help="Probability with which epsilon need not hold; below 1 over the number of "
            f"devices.  [default: {accountant.DELTA:g}]",
        ),
        click.Option(
            ["--noise"], type=click.Choice(PLACEMENTS),
            help="Who adds the noise: the cloud, or each device under masking.  "
            f"[default: {CENTRAL}]",
        ),
        click.Option(
            ["--noise-multiplier"], metavar="NUMBER",
            type=click.FloatRange(accountant.MIN_MULTIPLIER, accountant.MAX_MULTIPLIER),
            help="Standard deviation of the noise of a round over --clip.  [default: the least "
            "that --epsilon allows for all rounds]",
        ),
        click.Option(
            ["--clip"], metavar="NORM", type=click.FloatRange(clipping.MIN_NORM, clipping.MAX_NORM),
            help="Norm to which a device's change is clipped; the first one with --clip-quantile."
            f"  [default: {CLIP:g}]",
        ),
        click.Option(
            ["--clip-quantile"], metavar="SHARE", type=click.FloatRange(0.01, 0.99),
            help="Let the norm follow this quantile of the changes' norms, by bits that get noise "
            "and are charged.  [default: it is fixed]",
        ),
        click.Option(
            ["--separation"], metavar="N", type=click.IntRange(1, central.MAX_BANDS),
            help="Rounds from one use of a device to its next, at least.  [default: 1]",
        ),
        click.Option(
            ["--correlated"], is_flag=True, default=None,
            help="Let later rounds take back a part of the noise; needs --separation 2 or more.",
        ),
        click.Option(
            ["--most-uses"], metavar="N", type=click.IntRange(1, budget.MAX_ROUNDS),
            help="Rounds that may use one device.  [default: no limit]",
        ),
        click.Option(
            ["--mask"], is_flag=True, default=None,
            help="Mask updates, so that the cloud learns only their sum.",
        ),
        click.Option(
            ["--least-cohort"], metavar="N", type=click.IntRange(3, 10_000),
            help="Fewest devices whose sum may be unmasked.",
        ),
        click.Option(
            ["--lost-share"], metavar="SHARE", type=share,
            help="Share of a round's devices that may be lost.  "
            f"[default: {defaults.LOST_SHARE:g}]",
        ),
        click.Option(
            ["--colluding-share"], metavar="SHARE", type=share,
            help="Share of them that may collude with the cloud.  "
            f"[default: {defaults.COLLUDING_SHARE:g}]",
        ),
        click.Option(
            ["--mask-failure"], metavar="NUMBER",
            type=click.FloatRange(0, 1, min_open=True, max_open=True),
            help="Probability that the bounds on a device's neighbours do not hold.  "
            f"[default: {defaults.MASK_FAILURE:g}]",
        ),
        click.Option(
            ["--groups"], metavar="N", type=click.IntRange(2, 1000),
            help="Divide the devices of a round at random into so many groups that are masked "
            "apart; --aggregator then combines their means.  [default: one group]",
        ),
    ]  # fmt: skip


def privacy_set(params: dict[str, Any]) -> dict[str, Any]:
    """Take the options out of a command's parameters; return `NOISE` and `MASKING`.

    Their values are dictionaries with the names of the wire, or None. UsageError: an option has no
    effect beside the others.
    """
    from triplane.unified_ir.federated.privacy.settings import DISTRIBUTED

    names = (*NOISE_FIELDS, *MASKING_FIELDS, "mask")
    values = {name: v for name in names if (v := params.pop(name, None)) is not None}
    for name, needed in NEEDS.items():
        if name in values and not values.keys() & set(needed):
            others = " or ".join(map(flag, needed))
            raise click.UsageError(f"{flag(name)} has no effect without {others}; add one")
    if values.get("noise") == DISTRIBUTED and "mask" not in values:
        raise click.UsageError("--noise distributed hides nothing without --mask; add it")
    noise = {field: values[name] for name, field in NOISE_FIELDS.items() if name in values}
    masking = {field: values[name] for name, field in MASKING_FIELDS.items() if name in values}
    return {NOISE: noise or None, MASKING: masking if "mask" in values else None}


def study_privacy(options: Mapping[str, Any]) -> DifferentialPrivacy | None:
    """Return the privacy of a study; InvalidInput: another option does not go with it."""
    from triplane.unified_ir.federated.privacy.settings import DifferentialPrivacy

    asked = options[NOISE]
    if asked is None:
        return None
    if odd := options[LIMITS].keys() & {"norm_bound", "max_examples", "returns"}:
        raise InvalidInput(
            f"{flag(min(odd))} does not go with differential privacy: --clip is the bound, all "
            "devices weigh the same, and which state is next must not depend on losses"
        )
    renamed = {"clip_quantile": "quantile"}
    return DifferentialPrivacy(**{renamed.get(k, k): v for k, v in asked.items()})


def study_masking(options: Mapping[str, Any]) -> MaskedStudy | None:
    """Return the masking of a study; InvalidInput: it has no norm that bounds its integers."""
    from triplane.unified_ir.federated.core.limits import ADAPTIVE, OFF, first_bound, is_adaptive
    from triplane.unified_ir.federated.masking.adaptive import START
    from triplane.unified_ir.federated.privacy.settings import CLIP
    from triplane.unified_ir.federated.study.masked_sums import MaskedStudy

    asked, noise, limits = options[MASKING], options[NOISE], options[LIMITS]
    if asked is None:
        return None
    bound = limits.get("norm_bound", ADAPTIVE)
    if bound == OFF:
        raise InvalidInput(
            "masked updates are integers in a range that follows from their norm, so --mask needs "
            "a bound; set --norm-bound to a number, or leave it out"
        )
    norm, follows = first_bound(bound, START), is_adaptive(bound)
    if noise is not None:
        norm, follows = noise.get("clip", CLIP), "clip_quantile" in noise
    cap = limits.get("max_examples", MASKED_CAP)
    return MaskedStudy(norm=norm, follows=follows, cap=cap, **asked)


def study_facts(options: dict[str, Any]) -> dict[str, Any]:
    """Return what limits devices, adds noise and masks in a study, by option, for its page."""
    facts = dict(options[NOISE] or limit_facts(options))
    if options[MASKING] is not None:
        asked = options[MASKING]
        stated = {name: asked[k] for name, k in MASKING_FIELDS.items() if k in asked}
        facts |= {"masking": "yes", **stated}
    return facts
