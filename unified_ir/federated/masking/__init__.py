"""Secure aggregation: the cloud learns the sum of a cohort's integers, and of no smaller group.

SecAgg+ (Bell et al. 2020, https://eprint.iacr.org/2020/704), hardened against a cloud that does not
follow the protocol, as two state machines without a network: `MaskingDevice` and `MaskingCloud`.
Decision 0075 says which attacks are left. It needs the extra `device`, for cryptography.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from triplane.proto.lazy import lazy_names

if TYPE_CHECKING:
    from triplane.unified_ir.federated.masking.cloud import MaskingCloud as MaskingCloud
    from triplane.unified_ir.federated.masking.cloud import MaskingPhase as MaskingPhase
    from triplane.unified_ir.federated.masking.device import MaskingDevice as MaskingDevice
    from triplane.unified_ir.federated.masking.encoding import EncodedSection as EncodedSection
    from triplane.unified_ir.federated.masking.encoding import UpdateEncoding as UpdateEncoding
    from triplane.unified_ir.federated.masking.encoding import range_for as range_for
    from triplane.unified_ir.federated.masking.fields import MaskedField as MaskedField
    from triplane.unified_ir.federated.masking.ledger import LedgerEntry as LedgerEntry
    from triplane.unified_ir.federated.masking.ledger import LedgerStore as LedgerStore
    from triplane.unified_ir.federated.masking.ledger import MaskingLedger as MaskingLedger
    from triplane.unified_ir.federated.masking.messages import MaskingTerms as MaskingTerms
    from triplane.unified_ir.federated.masking.parameters import (
        MaskingParameters as MaskingParameters,
    )
    from triplane.unified_ir.federated.masking.parameters import (
        choose_parameters as choose_parameters,
    )
    from triplane.unified_ir.federated.masking.primitives import EcdsaSigner as EcdsaSigner
    from triplane.unified_ir.federated.masking.primitives import EcdsaVerifier as EcdsaVerifier
    from triplane.unified_ir.federated.masking.primitives import roster_verifier as roster_verifier

__getattr__, __dir__, __all__ = lazy_names(__name__)
