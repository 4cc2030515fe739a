#include "transfer/plan.h"

#include <algorithm>

#include "transfer/cached_rows.h"

namespace tensorferry {
namespace {

uint64_t align_down(uint64_t value, uint64_t alignment) { return value / alignment * alignment; }
uint64_t align_up(uint64_t value, uint64_t alignment) { return align_down(value + alignment - 1, alignment); }

}  // namespace

Plan::Plan(const PlanInput& input, const Segments& segments)
    : input_(input), segments_(&segments), nbytes_(segments.nbytes()) {
  step_ = input.block_nbytes;
  bounce_step_ = input.verified_nbytes ? input.bounce_nbytes : std::min(input.block_nbytes, input.bounce_nbytes);
  if (!input.direct) return;

  // Alignments are powers of two, so the larger is a multiple of the smaller.
  alignment_ = input.write ? std::max(input.offset_alignment, input.page_nbytes) : input.offset_alignment;
  step_ = align_up(step_, alignment_);
  bounce_step_ =
      std::min(align_up(bounce_step_, alignment_), std::max(align_down(input.bounce_nbytes, alignment_), alignment_));
  const uint64_t first = align_up(input.offset, alignment_);
  const uint64_t last = align_down(input.offset + nbytes_, alignment_);
  body_begin_ = first < last ? first - input.offset : nbytes_;
  body_end_ = first < last ? last - input.offset : nbytes_;
}

// Whether `rest`, a gap or the rest of one, is not read.
bool Plan::is_passed_over(const Segments::Piece& rest) const {
  if (!rest.is_gap() || input_.all_wanted) return false;
  const uint64_t end = rest.begin + rest.nbytes;
  if (end == nbytes_) return true;
  if (!input_.rows) return rest.nbytes >= min_gap_nbytes;
  const uint64_t page = input_.page_nbytes;
  return align_up(input_.offset + rest.begin, page) + page <= input_.offset + end;
}

// Whether `rest`, a row of a table or the rest of one, has its last page for itself: no wanted data follows in that
// page.
bool Plan::is_alone(const Segments::Piece& rest) const {
  if (!input_.rows) return false;
  return rest.begin + rest.nbytes == nbytes_ || is_passed_over((*segments_)[rest.segment + 1]);
}

uint64_t Plan::skip(uint64_t position) const {
  while (position < nbytes_) {
    const auto rest = segments_->at(position);
    // A block of rows does not begin with a gap.
    if (!is_passed_over(rest) && !(input_.rows && rest.is_gap())) break;
    position += rest.nbytes;
  }
  return position;
}

// Bytes from this position on that can be moved by direct I/O straight from or to a segment.
uint64_t Plan::straight_nbytes(uint64_t position) const {
  if (position < body_begin_ || position >= body_end_ || (input_.offset + position) % alignment_ != 0) return 0;
  if (input_.verified_nbytes) return 0;
  const auto rest = segments_->at(position);
  if (rest.is_gap() || (!rest.in_host() && !input_.cufile)) return 0;
  if (reinterpret_cast<uintptr_t>(rest.memory) % input_.memory_alignment != 0) return 0;
  const uint64_t usable = std::min(align_down(rest.nbytes, alignment_), body_end_ - position);
  const bool worth_it = usable >= min_straight_nbytes || segments_->count() == 1;
  if (!worth_it && !(usable == rest.nbytes && is_alone(rest))) return 0;
  return std::min(step_, usable);
}

// Bytes from this position on that can be moved through the page cache straight from or to a segment. There are no
// alignment rules.
uint64_t Plan::cached_nbytes(uint64_t position, uint64_t limit) const {
  const auto rest = segments_->at(position);
  if (!rest.in_host() || input_.verified_nbytes) return 0;
  const uint64_t usable = std::min(rest.nbytes, limit - position);
  if (usable < std::min(min_straight_nbytes, limit - position) && !is_alone(rest)) return 0;
  return std::min(step_, usable);
}

// The end of a bounced block: `limit`, or the beginning of data that needs no buffer or is not read.
uint64_t Plan::end_of_bounced(uint64_t position, uint64_t limit, bool direct) const {
  if (input_.verified_nbytes) return limit;
  for (size_t index = segments_->index_at(position); index < segments_->count(); ++index) {
    const auto& segment = (*segments_)[index];
    const uint64_t begin = std::max(segment.begin, position);
    if (begin >= limit) break;
    const bool last = segment.begin + segment.nbytes == nbytes_;
    const uint64_t least_nbytes = !input_.rows ? min_gap_nbytes : segment.is_gap() ? 1 : min_straight_nbytes;
    if (segment.nbytes < least_nbytes && (!last || input_.rows))
      continue;  // checked first because it is cheap: there may be a million such segments
    if (begin > position && is_passed_over(segments_->at(begin))) {
      // Only a read has gaps, and a block of a read may end anywhere, because it is padded.
      return begin;
    }
    const uint64_t first = direct ? align_up(input_.offset + begin, alignment_) - input_.offset : begin;
    if (first <= position || first >= limit || segments_->index_at(first) != index) continue;
    if (direct ? straight_nbytes(first) > 0 : cached_nbytes(first, nbytes_) >= min_straight_nbytes) return first;
  }
  return limit;
}

// Chunks are verified as a whole, so a block ends with the last chunk that fits.
uint64_t Plan::verified_end(uint64_t position, uint64_t end, uint64_t limit) const {
  if (!input_.verified_nbytes || end == nbytes_) return end;
  const uint64_t whole = align_down(end, input_.verified_nbytes);
  return whole > position ? whole : std::min(position + input_.verified_nbytes, limit);
}

PlannedBlock Plan::block_at(uint64_t position) const {
  const uint64_t from = input_.offset + position;
  if (const uint64_t nbytes = straight_nbytes(position)) return {true, false, false, position, nbytes, from, nbytes};

  if (input_.direct && !input_.write) {
    const uint64_t io_begin = align_down(from, input_.offset_alignment);
    uint64_t end = std::min(io_begin + bounce_step_ - input_.offset, nbytes_);
    end = end_of_bounced(position, verified_end(position, end, nbytes_), true);
    const uint64_t io_end = align_up(input_.offset + end, input_.offset_alignment);
    return {true, true, false, position, end - position, io_begin, io_end - io_begin};
  }
  if (position >= body_begin_ && position < body_end_) {
    const uint64_t end = end_of_bounced(position, std::min(position + bounce_step_, body_end_), true);
    return {true, true, false, position, end - position, from, end - position};
  }

  if (const uint64_t end = input_.rows && input_.cached ? end_of_cached_rows(*segments_, position) : 0;
      end > position) {
    return {false, false, true, position, end - position, from, nbytes_of_rows(*segments_, position, end)};
  }

  const uint64_t limit = input_.direct && position < body_begin_ ? body_begin_ : nbytes_;
  if (const uint64_t nbytes = cached_nbytes(position, limit))
    return {false, false, false, position, nbytes, from, nbytes};
  uint64_t end = std::min(position + bounce_step_, limit);
  end = end_of_bounced(position, verified_end(position, end, limit), false);
  return {false, true, false, position, end - position, from, end - position};
}

PlannedBlock Plan::buffered(const PlannedBlock& block) const {
  const auto rest = segments_->at(block.begin);
  const bool straight = rest.in_host() && rest.nbytes >= block.nbytes && !input_.verified_nbytes;
  return {false, !straight, false, block.begin, block.nbytes, input_.offset + block.begin, block.nbytes};
}

bool Plan::uses_buffered() const {
  return !input_.direct || (input_.write && (body_begin_ > 0 || body_end_ < nbytes_));
}

}  // namespace tensorferry
