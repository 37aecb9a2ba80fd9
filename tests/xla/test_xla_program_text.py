"""The products and messages that are read off the text of a compiled program. Needs neither JAX nor a device."""

from __future__ import annotations

import pytest

from phalanx.xla.program_text import Collective, read_program

LOOP = """HloModule jit__step, is_scheduled=true

%fused (param_0: f32[4,8], param_1: bf16[8,16]) -> f32[4,16] {
  %param_0 = f32[4,8]{1,0} parameter(0)
  %param_1 = bf16[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[4,16]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(f)/dot(general)"}
}

%body (arg: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %arg = (s32[], f32[4,8]{1,0}) parameter(0)
  %x = f32[4,8]{1,0} get-tuple-element(%arg), index=1
  %y = f32[4,16]{1,0} fusion(%x, %x), kind=kOutput, calls=%fused
  %both = (f32[4,16]{1,0}, /*index=1*/s32[]) all-reduce(%y, %n), channel_id=1, replica_groups=GROUPS, to_apply=%add
  ROOT %out = (s32[], f32[4,8]{1,0}) tuple(%n, %x)
}

ENTRY %main.1_spmd (p: f32[4,8]) -> f32[4,8] {
  %loop = (s32[], f32[4,8]{1,0}) while(%start), condition=%until, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %moved = bf16[4,8]{1,0} collective-permute(%p), channel_id=2, source_target_pairs={{0,0},{1,2},{2,1},{3,3}}
  ROOT %part = f32[2,8]{1,0} reduce-scatter(%p), channel_id=3, replica_groups={{0,2},{1,3}}, dimensions={0}, to_apply=%add
}
"""

GROUPS = {
    "{{0,1},{2,3},{4,5},{6,7}}": (0, 1),
    "[4,2]<=[4,2]T(1,0)": (0, 2),
    "[2,4]<=[8]": (0, 1, 2, 3),
    "mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}": (0, 2, 4, 6),
    "mesh['axis_0'=2,'axis_1'=4], device_ids=([2,2,2]T(1,0,2)) {'axis_0'}": (0, 2),
    "mesh['axis_0'=2,'axis_1'=4] {'axis_1':(2)2}": (0, 1),
    "mesh['axis_0'=2,'axis_1'=4] {'axis_1':(1)2}": (0, 2),
    "{}": tuple(range(8)),
}


@pytest.mark.parametrize(("written", "group"), GROUPS.items())
def test_groups_of_devices_in_every_notation(written: str, group: tuple[int, ...]) -> None:
    program = read_program(LOOP.replace("GROUPS", written), 8)
    size = 4 * 16 * 4 + 4
    many = len(group)
    assert program.collectives[0] == Collective("all-reduce", group, size * (many - 1) // many * 2, 3)


def test_a_loop_counts_as_often_as_it_runs() -> None:
    program = read_program(LOOP.replace("GROUPS", "{}"), 8)
    assert program.flops == 3 * 2 * 4 * 16 * 8 and program.operands == {"f32 bf16": program.flops}
    assert program.collectives[1:] == [
        Collective("collective-permute", (1, 2), 4 * 8 * 2, 1),
        Collective("reduce-scatter", (0, 2), 2 * 8 * 4, 1),
    ]
    assert program.endless == 0
    assert read_program(LOOP.replace('"known_trip_count":{"n":"3"}', "").replace("GROUPS", "{}"), 8).endless == 1


CUBLAS = """HloModule jit__step

ENTRY %main.1 (p: bf16[2,4,8], q: bf16[16,8]) -> bf16[2,4,16] {
  %p = bf16[2,4,8]{2,1,0} parameter(0)
  %q = bf16[16,8]{1,0} parameter(1)
  %product = (bf16[2,4,16]{2,1,0}, s8[4194304]{0}) custom-call(bf16[2,4,8]{2,1,0} %p, bf16[16,8]{1,0} %q), custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"beta":0,"dot_dimension_numbers":{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[]}}}
  %attended = (bf16[2,4,16]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  ROOT %result = bf16[2,4,16]{2,1,0} get-tuple-element(%product), index=0
}
"""


def test_products_of_cublas_count() -> None:
    program = read_program(CUBLAS, 1)
    assert program.flops == 2 * 2 * 4 * 16 * 8 and program.operands == {"bf16 bf16": program.flops}
