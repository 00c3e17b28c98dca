// What a CTA of window_attention.cu has to do, and how the pool's keys and values come into its shared memory.
#pragma once

#include "tensor_core.cuh"

constexpr int THREADS = 32 * WARPS;
constexpr int PIECE = 8, PIECES = HEAD_DIM / PIECE;  // elements of a piece, pieces of a row
constexpr int KEYS = 16, TILE = KEYS * PIECES;       // of a block, and the pieces of its keys or of its values
constexpr int ROWS = 16 * ROW_TILES;
constexpr int COPY_ROWS = 32 / PIECES, COPIES = KEYS / COPY_ROWS;  // rows that a warp copies at once
constexpr int SUM_STRIDE = HEAD_DIM + 8;                           // rows that are written together: other banks

// Zeros where the source is not there: it is not read then.
__device__ inline void copy_piece(uint4* destination, const u16* source, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
        :: "r"(shared_address(destination)), "l"(source), "r"(is_there ? 16 : 0) : "memory");
}

__device__ inline int place(int row, int piece) { return row * PIECES + (piece ^ row % 8); }

struct Windows {  // window_attention_cuda.py has the same
    const u16 *qkv, *turns, *norm_weight;
    u16 *layer, *out;
    const int *block_tables, *kv_lens;
    const i64 *kv_slots, *num_padding;
    float *partials, *log_sums;  // null: the splits of a tile are a cluster
    i64 value_offset;
    int table_stride, max_len, window, group, kv_heads, page_shift, tiles, splits, min_keys;
    float scale, eps;

    __device__ bool in_clusters() const { return partials == nullptr; }
    __device__ int heads() const { return kv_heads * group; }
    __device__ i64 token_stride() const { return static_cast<i64>(kv_heads) * HEAD_DIM; }
};

// What of the windows is this CTA's. Blocks have 16 keys that were in the pool before. What is read before the wait is
// read through the L2 cache: nobody promises that the L1 cache has not kept it from an earlier kernel.
struct Part {
    int request, kv_head, split, kv_len, num_own, num_old, first_block, end_block, num_used;

    __device__ explicit Part(const Windows& w) {
        // Splits that are no cluster may have no keys: between those that have some they would take places.
        const int tile = w.in_clusters() ? blockIdx.x / w.splits : blockIdx.x % w.tiles;
        split = w.in_clusters() ? blockIdx.x % w.splits : blockIdx.x / w.tiles;
        request = tile / w.kv_heads;
        kv_head = tile % w.kv_heads;
        kv_len = __ldcg(w.kv_lens + request);
        num_own = w.window - (w.num_padding == nullptr ? 0 : static_cast<int>(__ldcg(w.num_padding + request)));
        num_old = min(max(kv_len - num_own, 0), w.max_len);
        const int blocks = (num_old + KEYS - 1) / KEYS;
        const int number = min(max((num_old - 1) / w.min_keys, 1), w.splits);
        const int share = max((blocks + number - 1) / number, 1);
        num_used = max((blocks + share - 1) / share, 1);
        first_block = min(split * share, blocks);
        end_block = min(first_block + share, blocks);
    }
    __device__ bool has_window() const { return split == num_used - 1; }
};

// The tiles of one warp, on their way into its ring.
struct Stream {
    const Windows& w;
    const Part& part;
    uint4* ring;
    int lane, first, block, turn, pages, fetched, taken;
    bool is_value;
    const u16* source;

    __device__ Stream(const Windows& w, const Part& part, uint4* ring, int warp, int lane)
        : w(w), part(part), ring(ring), lane(lane), first(part.first_block + warp), block(first), turn(0), pages(0),
          fetched(0), taken(0), is_value(false), source(nullptr) {
#pragma unroll 1
        for (int i = 0; i < DEPTH - 1; ++i) fetch();
    }
    // Every lane knows the page of one of the warp's next 32 blocks.
    __device__ void locate() {
        if (turn % 32 == 0) {
            const int ahead = block + lane * WARPS;
            if (ahead < part.end_block)
                pages = __ldcg(w.block_tables + static_cast<i64>(part.request) * w.table_stride + (ahead * KEYS >> w.page_shift));
        }
        const i64 page = __shfl_sync(~0u, pages, turn % 32);
        const i64 first = (page << w.page_shift) + (block * KEYS & (1 << w.page_shift) - 1);
        source = w.layer + (first + lane / PIECES) * w.token_stride() + part.kv_head * HEAD_DIM + lane % PIECES * PIECE;
    }
    __device__ void fetch() {
        if (block < part.end_block) {
            if (!is_value) locate();
            const u16* from = is_value ? source + w.value_offset : source;
            uint4* to = ring + fetched * TILE;
            const int num_there = part.num_old - block * KEYS;
#pragma unroll
            for (int i = 0; i < COPIES; ++i) {
                const int row = lane / PIECES + i * COPY_ROWS;
                copy_piece(to + place(row, lane % PIECES), from + i * COPY_ROWS * w.token_stride(), row < num_there);
            }
            if (is_value) {
                block += WARPS;
                ++turn;
            }
            is_value = !is_value;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        fetched = fetched == DEPTH - 1 ? 0 : fetched + 1;
    }
    // The oldest tile; the one before it is given up.
    __device__ const uint4* take() {
        asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 2) : "memory");
        __syncwarp();
        fetch();
        const uint4* tile = ring + taken * TILE;
        taken = taken == DEPTH - 1 ? 0 : taken + 1;
        return tile;
    }
};
