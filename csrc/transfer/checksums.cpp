#include "transfer/checksums.h"

#include <algorithm>

namespace tensorferry {
void Checksums::attach(const Segments& segments) {
  std::lock_guard lock(mutex_);
  nbytes_ = segments.nbytes();
  kept_nbytes_ = 0;
  of_ = &segments;
  chunks_ = {std::vector<uint32_t>(chunk_count(nbytes_)), {}};
  segments_ = {std::vector<uint32_t>(of_segments_ ? segments.count() : 0), {}};
}

void Checksums::Block::add(const char* bytes, uint64_t nbytes, size_t segment) {
  const bool of_chunks = all_->chunk_nbytes_ > 0;
  while (nbytes > 0) {
    const uint64_t end = of_chunks ? std::min(all_->chunk_end(position_), position_ + nbytes) : position_ + nbytes;
    const uint64_t length = end - position_;
    const size_t chunk = of_chunks ? position_ / all_->chunk_nbytes_ : 0;
    if (of_chunks && !chunk_) chunk_ = Part{{}, chunk, position_};
    if (all_->of_segments_ && (!segment_ || segment_->index != segment)) {
      if (segment_) segments_.push_back(*segment_);
      segment_ = Part{{}, segment, position_};
    }
    tensorferry::add(chunk_ ? &*chunk_ : nullptr, segment_ ? &*segment_ : nullptr, bytes, length);
    position_ = end;
    bytes += length;
    nbytes -= length;
    if (chunk_ && position_ == all_->chunk_end(chunk_->begin)) {
      chunks_.push_back(*chunk_);
      chunk_.reset();
    }
  }
}

std::optional<uint64_t> Checksums::Block::keep() {
  if (chunk_) chunks_.push_back(*chunk_);
  if (segment_) segments_.push_back(*segment_);
  std::lock_guard lock(all_->mutex_);
  for (const Part& part : chunks_) {
    const bool whole = all_->chunks_.add(part, all_->nbytes_of_chunk(part.index));
    if (whole && all_->verify() && all_->expected_[part.index] != all_->chunks_.crcs[part.index]) return part.index;
  }
  for (const Part& part : segments_) all_->segments_.add(part, (*all_->of_)[part.index].nbytes);
  all_->kept_nbytes_ += position_ - begin_;
  return std::nullopt;
}

bool Checksums::Table::add(const Block::Part& part, uint64_t nbytes) {
  if (part.nbytes == nbytes) {
    crcs[part.index] = part.crc;
    return true;
  }
  Open& found = open[part.index];
  found.parts.emplace(part.begin, part);
  found.nbytes += part.nbytes;
  if (found.nbytes < nbytes) return false;
  uint32_t crc = 0;
  for (const auto& [begin, one] : found.parts) crc = crc32_combine(crc, one.crc, one.nbytes);
  crcs[part.index] = crc;
  open.erase(part.index);
  return true;
}

}  // namespace tensorferry
