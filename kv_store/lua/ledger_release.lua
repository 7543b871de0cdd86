-- End one reservation. ARGV: nonce, ms for which to remember a release that comes first.
-- Returns {1 if this call ended it, ...}.
sweep()
local nonce = ARGV[3]
local record = record_of(nonce)
local is_live = record and record[8] == 1 and record[7] > now
if is_live then
  close(nonce, record)
elseif not record then
  remember(nonce, {'', '', '', 0, 0, 0, now + ARGV[4], 0})
end
return {is_live and 1 or 0, save()}
