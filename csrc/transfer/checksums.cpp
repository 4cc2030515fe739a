#include "transfer/checksums.h"

#include <algorithm>

#include "checksum/checksum.h"

namespace tensorferry {
namespace {

// Shorter pieces are summed twice, for their chunk and for their segment, rather than combined.
constexpr uint64_t min_combined_nbytes = 4096;

}  // namespace

void Checksums::begin(const Segments& segments) {
  std::lock_guard lock(mutex_);
  nbytes_ = segments.nbytes();
  kept_nbytes_ = 0;
  of_ = &segments;
  chunks_ = {std::vector<uint32_t>(chunk_count(nbytes_)), {}};
  segments_ = {std::vector<uint32_t>(of_segments_ ? segments.count() : 0), {}};
}

void Checksums::Block::add(const char* bytes, uint64_t nbytes, size_t segment) {
  const bool of_chunks = all_.chunk_nbytes_ > 0;
  while (nbytes > 0) {
    const uint64_t end = of_chunks ? std::min(all_.chunk_end(position_), position_ + nbytes) : position_ + nbytes;
    const uint64_t length = end - position_;
    const size_t chunk = of_chunks ? position_ / all_.chunk_nbytes_ : 0;
    if (of_chunks && !chunk_) chunk_ = Part{chunk, position_, 0, 0};
    if (all_.of_segments_ && (!segment_ || segment_->index != segment)) {
      if (segment_) segments_.push_back(*segment_);
      segment_ = Part{segment, position_, 0, 0};
    }
    if (chunk_ && segment_ && length >= min_combined_nbytes) {
      const uint32_t crc = crc32(0, bytes, length);
      for (Part* part : {&*chunk_, &*segment_}) {
        part->crc = part->nbytes == 0 ? crc : crc32_combine(part->crc, crc, length);
      }
    } else {
      if (chunk_) chunk_->crc = crc32(chunk_->crc, bytes, length);
      if (segment_) segment_->crc = crc32(segment_->crc, bytes, length);
    }
    if (chunk_) chunk_->nbytes += length;
    if (segment_) segment_->nbytes += length;
    position_ = end;
    bytes += length;
    nbytes -= length;
    if (chunk_ && position_ == all_.chunk_end(chunk_->begin)) {
      const bool whole = chunk_->nbytes == all_.nbytes_of_chunk(chunk);
      if (whole && all_.verify() && !damaged_ && all_.expected_[chunk] != chunk_->crc) damaged_ = chunk;
      chunks_.push_back(*chunk_);
      chunk_.reset();
    }
  }
}

void Checksums::Block::keep() {
  if (chunk_) chunks_.push_back(*chunk_);
  if (segment_) segments_.push_back(*segment_);
  std::lock_guard lock(all_.mutex_);
  all_.kept_nbytes_ += position_ - begin_;
  for (const Part& part : chunks_) all_.chunks_.add(part, all_.nbytes_of_chunk(part.index));
  for (const Part& part : segments_) all_.segments_.add(part, (*all_.of_)[part.index].nbytes);
}

void Checksums::Table::add(const Block::Part& part, uint64_t nbytes) {
  if (part.nbytes == nbytes) {
    crcs[part.index] = part.crc;
    return;
  }
  Open& found = open[part.index];
  found.parts.emplace(part.begin, part);
  found.nbytes += part.nbytes;
  if (found.nbytes < nbytes) return;
  uint32_t crc = 0;
  for (const auto& [begin, one] : found.parts) crc = crc32_combine(crc, one.crc, one.nbytes);
  crcs[part.index] = crc;
  open.erase(part.index);
}

}  // namespace tensorferry
