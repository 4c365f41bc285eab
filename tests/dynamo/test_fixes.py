import pytest

from polyport.patching import GraphFix, Patch
from polyport.testing import check_patch
from polyport_dynamo.fixes import PATCHES


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_fix_is_needed_and_works(patch: Patch | GraphFix) -> None:
    check_patch(patch)


def test_ids_are_unique() -> None:
    ids = [patch.id for patch in PATCHES]
    assert len(set(ids)) == len(ids)
