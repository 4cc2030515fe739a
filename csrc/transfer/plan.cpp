#include "transfer/plan.h"

#include <algorithm>

namespace tensorferry {
namespace {

uint64_t align_down(uint64_t value, uint64_t alignment) { return value / alignment * alignment; }
uint64_t align_up(uint64_t value, uint64_t alignment) { return align_down(value + alignment - 1, alignment); }

}  // namespace

Plan::Plan(const PlanInput& input) : input_(input) {
  const uint64_t end = input.offset + input.nbytes;
  body_end_ = input.nbytes;
  const bool staged = input.staging == Staging::all;
  step_ = input.staging == Staging::none ? input.block_nbytes : std::min(input.block_nbytes, input.bounce_nbytes);
  if (!input.direct) return;

  // Alignments are powers of two, so the larger is a multiple of the smaller.
  const uint64_t alignment = input.write ? std::max(input.offset_alignment, input.page_nbytes) : input.offset_alignment;
  const uint64_t first = align_up(input.offset, alignment);
  const uint64_t last = align_down(end, alignment);
  const uint64_t direct_step = align_up(input.block_nbytes, alignment);
  const uint64_t bounce_step = std::min(direct_step, std::max(align_down(input.bounce_nbytes, alignment), alignment));
  const bool has_body = first < last;
  const bool memory_fits = has_body && !staged && (input.memory + (first - input.offset)) % input.memory_alignment == 0;

  if (memory_fits) {
    body_way_ = Way::direct;
    step_ = direct_step;
    body_begin_ = first - input.offset;
    body_end_ = last - input.offset;
  } else if (!input.write) {
    body_way_ = Way::bounced;  // padded at both ends, so head and tail belong to it
    step_ = bounce_step;
  } else if (has_body) {
    body_way_ = Way::bounced;
    step_ = bounce_step;
    body_begin_ = first - input.offset;
    body_end_ = last - input.offset;
  }
}

PlannedBlock Plan::block_at(uint64_t position) const {
  if (position < body_begin_ || position >= body_end_) {
    const uint64_t end = position < body_begin_ ? body_begin_ : input_.nbytes;
    if (input_.write) {
      return {Way::buffered, position, end - position, input_.offset + position, end - position};
    }
    const uint64_t io_begin = align_down(input_.offset + position, input_.offset_alignment);
    const uint64_t io_end = align_up(input_.offset + end, input_.offset_alignment);
    return {Way::bounced, position, end - position, io_begin, io_end - io_begin};
  }
  if (body_way_ == Way::bounced && !input_.write) {
    const uint64_t io_begin = align_down(input_.offset + position, input_.offset_alignment);
    const uint64_t end = std::min(io_begin + step_ - input_.offset, body_end_);
    const uint64_t io_end = align_up(input_.offset + end, input_.offset_alignment);
    return {Way::bounced, position, end - position, io_begin, io_end - io_begin};
  }
  const uint64_t nbytes = std::min(step_, body_end_ - position);
  return {body_way_, position, nbytes, input_.offset + position, nbytes};
}

bool Plan::uses_buffered() const {
  return body_way_ == Way::buffered || (input_.write && (body_begin_ > 0 || body_end_ < input_.nbytes));
}

}  // namespace tensorferry
